package main

import (
	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
)

// kinds are all kinds of volumes: a new kind is a folder and a line here.
var kinds = backend.Kinds{
	loop.Kind,
	nfs.Kind,
	local.Kind,
	disk.Kind,
}
