"""All that travels to the Hub: one flat folder of configurations, models and their bricks."""
