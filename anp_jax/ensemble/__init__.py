"""Trainings that differ in numbers alone, together on one device."""
