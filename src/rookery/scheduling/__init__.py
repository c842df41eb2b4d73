"""Pure decisions: data in, decision out. No I/O, no clock, no torch; the simulator runs these same functions."""
