// Package store keeps PersistentVolumes and PersistentVolumeClaims on disk, as an API
// server would: one JSON file for each, durable before a call returns. They are what
// kubectl would show, spec and status; there is no format of our own.
//
// It knows nothing of what the objects mean. It is loaded once, and one process writes.
package store
