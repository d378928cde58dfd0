"""Power: how many faults, planted one by one in the reference connector, does the contract layer find? (`bench power`)"""
