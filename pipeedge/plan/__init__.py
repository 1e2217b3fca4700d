"""Plan a run: models and devices, the scheduler, number types, predictions, simulation."""
