"""The planner: models traced or in closed form, memory and time of a plan, and the search over plans."""
