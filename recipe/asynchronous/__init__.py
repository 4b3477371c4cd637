"""Asynchronous RL: processes that sample, train and exchange weights, on this machine or on a Ray cluster."""
