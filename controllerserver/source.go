package controllerserver

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// sourceOf reads what a volume is to be made of; nil: of nothing (ErrInvalid; ErrNotFound
// if it is none of this driver's).
func sourceOf(c *csi.VolumeContentSource) (*volume.Source, error) {
	if c == nil {
		return nil, nil //nolint:nilnil // nothing is a source
	}
	var text, field string
	parse := volume.ParseID
	switch from := c.GetType().(type) {
	case *csi.VolumeContentSource_Snapshot:
		text, field, parse = from.Snapshot.GetSnapshotId(), "snapshot.snapshot_id", volume.ParseSnapshotID
	case *csi.VolumeContentSource_Volume:
		text, field = from.Volume.GetVolumeId(), "volume.volume_id"
	default:
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source has neither snapshot nor volume: name one")
	}
	if text == "" {
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source.%s is missing", field)
	}
	id, err := parse(text)
	if err != nil {
		return nil, volume.Errorf(volume.ErrNotFound, "volume_content_source.%s: %w", field, err)
	}
	return &volume.Source{Snapshot: c.GetSnapshot() != nil, ID: id}, nil
}

// contentSource is the inverse of sourceOf.
func contentSource(s *volume.Source) *csi.VolumeContentSource {
	switch {
	case s == nil:
		return nil
	case s.Snapshot:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.ID.String()},
		}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: s.ID.String()},
	}}
}

// checkSource refuses a source of which the backend can make no volume (CSI
// specification, "CreateVolume Errors").
func checkSource(b backend.Backend, s volume.Source) error {
	_, snapshots := b.(backend.Snapshotter)
	cloner, clones := b.(backend.Cloner)
	if !snapshots && !clones {
		return volume.Errorf(volume.ErrInvalid, "volume_content_source: backend %s makes no volume of another or of a snapshot: leave it out", b.Name())
	}
	if s.ID.Backend != b.Name() {
		return volume.Errorf(volume.ErrInvalid, "volume_content_source is %v, parameter %s=%q asks for another backend: use a StorageClass of backend %s", s, volume.ParamBackend, b.Name(), s.ID.Backend)
	}
	if clones {
		return cloner.CheckSource(s)
	}
	return nil
}
