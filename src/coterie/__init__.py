"""Coterie trains teams of language-model agents with on-policy reinforcement learning."""
