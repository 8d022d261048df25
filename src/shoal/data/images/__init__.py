"""Images: digits and MNIST, folders, zip and npz files, data sets of the hub."""
