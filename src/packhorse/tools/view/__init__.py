"""The plan viewer.

``saved_plan`` makes and saves the plan, ``plan_report`` computes its numbers, ``plan_viewer`` opens a saved
plan with its rows, ``pages`` and ``server`` show it in a browser.
"""
