"""What is not serving: training, inflate, doctor, plan, top, bench. `outrider COMMAND` reaches it by name."""
