// Package disk is the backend of volumes that are whole disks of one node, one blank disk
// for each volume, with a filesystem or as a raw device.
//
// Its pools (disks in the configuration) have their records in the state directory. A disk
// carries a GUID partition table with one partition of the driver's own type, whose GUID
// the record has: the data is the partition, so that a pod with the raw device cannot write
// to that mark. The record is durable before the first sector of the mark is written, and
// the mark is removed last; so after a crash a disk is blank, or some record has its GUID.
package disk
