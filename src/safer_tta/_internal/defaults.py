"""The default method and predictor. They have their own file so that `safer --help` does not import torch."""

METHOD = "tent"
PREDICTOR = "safer-g"
