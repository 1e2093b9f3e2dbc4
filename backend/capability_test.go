package backend_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestSupports: Registry.Supports accepts exactly the access modes, access types and filesystems that a
// volume's kind and its pool can have, and refuses others with ErrPrecondition.
func TestSupports(t *testing.T) {
	nodeImage := volume.Volume{ID: volume.ID{Backend: "loop", Pool: "p", PoolUUID: "01234567", Name: "v"}, FSType: "ext4"}
	sharedImage, directory, nodeDirectory := nodeImage, nodeImage, nodeImage
	sharedImage.ID.PoolUUID = ""
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
		{"image", nodeImage, volume.Capability{Mode: volume.SingleNodeWriter, FSType: "ext4"}, true},
		{"image on many nodes", nodeImage, volume.Capability{Mode: volume.MultiNodeReaderOnly}, false},
		{"image as nfs", nodeImage, volume.Capability{Mode: volume.SingleNodeWriter, FSType: "nfs"}, false},
		{"image of a shared pool", sharedImage, volume.Capability{Mode: volume.SingleNodeWriter}, true},
		{"image of a shared pool on many nodes", sharedImage, volume.Capability{Mode: volume.MultiNodeMultiWriter}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := registry.Supports(tc.v, tc.c); (err == nil) != tc.ok || err != nil && !errors.Is(err, volume.ErrPrecondition) {
				t.Errorf("got %v, want success: %t", err, tc.ok)
			}
		})
	}
}

// TestCheckCapabilities: mount flags must be those of the requested filesystem. For a volume with a source
// and without a requested filesystem, those of any filesystem are accepted.
func TestCheckCapabilities(t *testing.T) {
	for name, tc := range map[string]struct {
		source *volume.Source
		fsType string // of the class
		flag   string
		want   error
	}{
		"new volume, flag of the default filesystem":        {nil, "", "commit=30", nil},
		"new volume, flag of another filesystem":            {nil, "", "logbufs=8", volume.ErrInvalid},
		"restored volume, flag of any filesystem":           {&volume.Source{}, "", "logbufs=8", nil},
		"restored volume, flag of no filesystem":            {&volume.Source{}, "", "errors=panic", volume.ErrInvalid},
		"restored volume, flag of the requested filesystem": {&volume.Source{}, "xfs", "logbufs=8", nil},
		"restored volume, flag of another filesystem":       {&volume.Source{}, "ext4", "logbufs=8", volume.ErrInvalid},
	} {
		spec := volume.Spec{
			Source: tc.source, Parameters: volume.Parameters{Backend: "loop", Values: map[string]string{volume.ParamFSType: tc.fsType}},
			Capabilities: []volume.Capability{{MountFlags: []string{tc.flag}}},
		}
		if err := kinds.CheckCapabilities(spec); !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", name, err, tc.want)
		}
	}
}
