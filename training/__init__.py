"""On-policy distillation of the drafter and its length head."""
