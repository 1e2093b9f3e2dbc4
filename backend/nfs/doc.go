// Package nfs is the backend of volumes that are directories of an export, for many
// nodes at once. Their capacity is a number: a plain export lets nobody outgrow it
// less than the filesystem behind it.
//
// A volume's directory is `data` in the volume's folder, or where its class's subDir
// says. It is mounted by that path, so that nothing above it is reached through the
// mount; for a volume's folder is root's alone, whatever the mode of the directory.
package nfs
