"""Power: how many faults, planted one by one in the reference connector, do contract layer and own tests find? (`bench power`)"""
