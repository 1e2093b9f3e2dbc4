// Package hostpath is the plugin of hostPath volumes: existing files and directories of the machine.
package hostpath
