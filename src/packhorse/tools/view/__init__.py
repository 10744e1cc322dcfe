"""Looking at a plan: its numbers for the terminal, its packs and rows in a browser.

``saved_plan`` makes the plan that the loader trains and keeps it in a file, ``plan_report`` puts it into
numbers; ``viewer`` opens that file again, and ``server`` shows it as pages.
"""
