// Package blockdev works on block devices and images: it attaches loop devices, claims whole
// disks, recognizes the content of a device, and creates, checks and grows filesystems.
//
// It stores nothing outside of the devices, and has neither volumes nor pools.
package blockdev
