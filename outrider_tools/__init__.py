"""Commands besides serving: training, inflate, doctor, plan, top, bench. `outrider COMMAND` loads them by name."""
