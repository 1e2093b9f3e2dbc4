package nfs

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// wholeShare is the SubDir of a static volume that is the whole share.
const wholeShare = "."

// StaticVolume implements backend.StaticProvider. The volumeAttributes server and share, and optionally
// subDir, describe a static volume.
func (b *Backend) StaticVolume(id string, context map[string]string) (volume.Volume, bool, error) {
	server, subDir := volume.Attribute(context, volume.ParamServer), volume.Attribute(context, volume.ParamSubDir)
	share, err := volume.Share(context)
	if err != nil {
		return volume.Volume{}, false, fmt.Errorf("volume_context of volume %q: %w", id, err)
	}
	if server == "" && share == "" {
		return volume.Volume{}, false, nil
	}
	if server == "" || share == "" {
		return volume.Volume{}, false, volume.Errorf(volume.ErrInvalid, "volume_context of volume %q has %s=%q and %s=%q: give both", id, volume.ParamServer, server, volume.ParamShare, share)
	}
	name, err := volume.DirectPool(server, share)
	if err != nil {
		return volume.Volume{}, false, err
	}
	dir, err := cleanSubDir(subDir)
	if err != nil {
		return volume.Volume{}, false, err
	}
	return volume.Volume{
		ID:        volume.ID{Backend: Name, Pool: name, Name: volume.NameFor(id)},
		CoName:    id,
		Directory: &volume.Directory{SubDir: dir, OnDelete: volume.OnDeleteRetain},
	}, true, nil
}

// cleanSubDir validates the subDir of a static volume. It accepts any path below the share, even one that
// is reserved in a pool, because the share need not be a pool.
func cleanSubDir(s string) (string, error) {
	switch {
	case slices.Contains(strings.Split(s, "/"), ".."):
		return "", volume.Errorf(volume.ErrInvalid, "volume_context %s=%q: expected a path below the share, without ..", volume.ParamSubDir, s)
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }), len(s) > volume.MaxSubDir:
		return "", volume.Errorf(volume.ErrInvalid, "volume_context %s=%q: expected a path of at most %d bytes without control characters", volume.ParamSubDir, s, volume.MaxSubDir)
	}
	return cmp.Or(strings.TrimPrefix(path.Join("/", s), "/"), wholeShare), nil
}
