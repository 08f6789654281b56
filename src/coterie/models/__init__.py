"""Loading models, rendering prompts to ids, and the tiny model."""
