"""Models, drafters and an executor for tests: what shows the engine's races without a GPU. Nothing serves with it."""
