"""What is recommended, and taken where nothing is named; kept apart so that `safer --help` does not import torch."""

METHOD = "tent"
PREDICTOR = "safer-g"
