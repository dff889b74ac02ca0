"""The checks of `finwhale validate`: does a loaded checkpoint behave as a trained model does?"""
