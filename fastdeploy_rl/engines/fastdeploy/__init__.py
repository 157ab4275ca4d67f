"""FastDeploy's engine: its workers keep their weights by this package, as a plugin of FastDeploy's.

`plugin` is what FastDeploy loads; `weight_manager.DynamicWeightManager` is for those who construct FastDeploy's weight
manager themselves.
"""
