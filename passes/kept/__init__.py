"""Values that Python code keeps from one pass of a model to the next: numbers, generators, tensors."""
