package pool

import "github.com/trivet-csi/trivet/volume"

// Forms are the forms of the records in tests of this package.
var Forms = volume.Forms{
	{Name: "loop", OnNodes: true, OnExports: true},
	{Name: "nfs", OnExports: true, Directory: true},
	{Name: "local", OnNodes: true, Directory: true},
}
