package backend_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

func TestSupports(t *testing.T) {
	local := volume.Volume{ID: volume.ID{Backend: "loop", Pool: "p", PoolUUID: "01234567", Name: "v"}, FSType: "ext4"}
	image, directory, nodeDirectory := local, local, local
	image.ID.PoolUUID = ""
	directory.ID, directory.FSType = volume.ID{Backend: "nfs", Pool: "nas", Name: "v"}, ""
	nodeDirectory.ID.Backend, nodeDirectory.FSType = "local", ""
	registry := kinds.Registry(nil)
	for _, tc := range []struct {
		name string
		v    volume.Volume
		c    volume.Capability
		ok   bool
	}{
		{"directory on many nodes", directory, volume.Capability{Mode: volume.MultiNodeMultiWriter}, true},
		{"directory with one writer on many nodes", directory, volume.Capability{Mode: volume.MultiNodeSingleWriter}, false},
		{"directory as nfs", directory, volume.Capability{Mode: volume.SingleNodeWriter, FSType: "nfs4"}, true},
		{"directory as ext4", directory, volume.Capability{Mode: volume.SingleNodeWriter, FSType: "ext4"}, false},
		{"directory as a device", directory, volume.Capability{Mode: volume.SingleNodeWriter, Block: true}, false},
		{"directory of a node", nodeDirectory, volume.Capability{Mode: volume.SingleNodeWriter}, true},
		{"directory of a node on many nodes", nodeDirectory, volume.Capability{Mode: volume.MultiNodeMultiWriter}, false},
		{"directory of a node as nfs", nodeDirectory, volume.Capability{Mode: volume.SingleNodeWriter, FSType: "nfs"}, false},
		{"image", local, volume.Capability{Mode: volume.SingleNodeWriter, FSType: "ext4"}, true},
		{"image on many nodes", local, volume.Capability{Mode: volume.MultiNodeReaderOnly}, false},
		{"image as nfs", local, volume.Capability{Mode: volume.SingleNodeWriter, FSType: "nfs"}, false},
		{"image of a shared pool", image, volume.Capability{Mode: volume.SingleNodeWriter}, true},
		{"image of a shared pool on many nodes", image, volume.Capability{Mode: volume.MultiNodeMultiWriter}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := registry.Supports(tc.v, tc.c); (err == nil) != tc.ok || err != nil && !errors.Is(err, volume.ErrPrecondition) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestSpecMountFlags: flags are those of the requested filesystem. A volume with a source has the
// source's filesystem if none is requested, and staging checks the flags.
func TestSpecMountFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		source *volume.Source
		fsType string // of the class
		flag   string
		want   error
	}{
		"new volume, flag of the default":      {nil, "", "commit=30", nil},
		"new volume, flag of another":          {nil, "", "logbufs=8", volume.ErrInvalid},
		"restored volume, flag of any":         {&volume.Source{}, "", "logbufs=8", nil},
		"restored volume, flag of none":        {&volume.Source{}, "", "errors=panic", volume.ErrInvalid},
		"restored volume, flag of the request": {&volume.Source{}, "xfs", "logbufs=8", nil},
		"restored volume, flag of another":     {&volume.Source{}, "ext4", "logbufs=8", volume.ErrInvalid},
	} {
		spec := volume.Spec{
			Source: tc.source, Parameters: volume.Parameters{Backend: "loop", Values: map[string]string{volume.ParamFSType: tc.fsType}},
			Capabilities: []volume.Capability{{MountFlags: []string{tc.flag}}},
		}
		if err := kinds.CheckCapabilities(spec); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
}
