// Package blockdev works on block devices and images: it attaches loop devices, claims whole
// disks, recognizes the content of a device, and creates, checks and grows filesystems.
//
// It keeps no records outside of the devices, and knows neither volumes nor pools.
package blockdev
