"""Who runs which layers: models and devices, the scheduler, number types, predictions, simulation."""
