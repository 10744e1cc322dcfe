"""Looking at a plan: its numbers for the terminal, its packs and rows in a browser.

``planning`` makes the plan that the loader trains, ``report`` puts it into numbers, ``plan_book`` keeps both
in one file; ``book`` opens that file again, and ``app`` shows it as pages.
"""
