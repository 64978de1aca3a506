"""The model compiler: capture, recognize, select, plan, prove, run; one file per stage."""
