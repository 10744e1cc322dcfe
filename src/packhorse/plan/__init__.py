"""Counts to packs, packs to steps and ranks: solvers, cost model, schedule, plan files, samplers."""
