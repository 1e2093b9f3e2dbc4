// Package store stores PersistentVolumes and PersistentVolumeClaims on disk: one JSON file for
// each, durable before a call returns. A file contains the object as kubectl shows it, spec and
// status.
//
// The package does not interpret the objects. It reads them once, and one process writes.
package store
