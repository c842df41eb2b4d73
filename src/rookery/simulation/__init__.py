"""The shipped controller under a virtual clock, with modelled workers in place of real ones."""
