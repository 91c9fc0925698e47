from data_prep.interrupt import leave_at_once_if_called

leave_at_once_if_called()
