package main

import (
	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/backend/nfs"
)

// kinds are all kinds of volumes. A new kind needs a package in backend and a line in this list.
var kinds = backend.Kinds{
	loop.Kind,
	nfs.Kind,
	local.Kind,
	disk.Kind,
	lvm.Kind,
}
