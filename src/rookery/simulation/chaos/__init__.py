"""The shipped controller among workers that fail in every way that they can, in virtual time.

* Everything of the service is real but its peers, its clock and how long its database takes.
* What must hold is checked at every event, from outside: :mod:`~rookery.simulation.chaos.invariants` keeps its own
  account of what was received and :mod:`~rookery.simulation.chaos.history` of what was committed.
* A run is a function of its plan and its seed: the same ones give the same event log, to the last byte.
"""
