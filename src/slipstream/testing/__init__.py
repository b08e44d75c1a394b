"""Models, drafters and an executor for tests: the machinery that shows the engine's races without a GPU. Nothing serves with it."""
