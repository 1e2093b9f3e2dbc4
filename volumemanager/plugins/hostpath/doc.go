// Package hostpath is the plugin of hostPath volumes: files and directories of the machine
// that are there without the volume manager.
package hostpath
