"""Plans: memory and time of a step on devices that are not present."""
