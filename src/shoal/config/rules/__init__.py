"""What must hold between settings, by subject. To import this is to have all rules."""

from shoal.config.rules import effects, feedback, fleets, models, optimizers, training, updates
from shoal.config.rules.rule import RULES, apply

__all__ = ["RULES", "apply", "effects", "feedback", "fleets", "models", "optimizers", "training", "updates"]
