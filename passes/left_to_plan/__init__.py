"""What models may say in their code and the plan decides: what is recomputed, and which ranks compute."""
