"""Predicts how a training scales on machines that are not here."""
