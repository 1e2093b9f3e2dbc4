// Package dm uses the logical volumes of LVM and the devices of the device mapper. It reads labels and metadata of
// physical volumes to find a volume group, and starts lvm(8) for changes and reports. Whether a logical volume is
// active is read from the kernel, without a process.
package dm
