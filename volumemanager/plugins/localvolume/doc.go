// Package localvolume is the plugin of local PersistentVolumes: directories, disks and partitions of
// one machine.
package localvolume
