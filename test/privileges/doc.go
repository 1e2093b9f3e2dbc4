// Package privileges measures which capabilities and directories of the node the driver needs. It runs the driver in
// namespaces like those of its container, and makes the calls in the life of a volume of each kind. First the driver has all
// capabilities, and confines itself, then it has exactly the capabilities and writable directories of a list. Its root has
// only these directories, and the programs and settings of this machine in place of those of the image. Then the test takes
// each capability and directory away, and compares the first call that fails with the list. The list is a table in
// docs/operations/security.md.
package privileges
