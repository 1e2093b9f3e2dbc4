package controllerserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// GetMetadataAllocated implements csi.SnapshotMetadataServer. Ranges have a variable length, because one
// range of adjacent data would be millions of blocks of a fixed size. The stream for a snapshot without
// data has no messages.
func (s *Server) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	tracker, snapshot, err := s.tracked(stream.Context(), req.GetSnapshotId())
	if err != nil {
		return err
	}
	ranges := tracker.Allocated(stream.Context(), snapshot, req.GetStartingOffset())
	return sendRanges(req, snapshot, ranges, func(blocks []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: snapshot.Size, BlockMetadata: blocks,
		})
	})
}

// GetMetadataDelta implements csi.SnapshotMetadataServer. The ranges contain all blocks that are not known
// to be equal. Their form is that of GetMetadataAllocated.
func (s *Server) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	tracker, base, target, err := s.pair(stream.Context(), req)
	if err != nil {
		return err
	}
	ranges := tracker.Changed(stream.Context(), base, target, req.GetStartingOffset())
	return sendRanges(req, target, ranges, func(blocks []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: target.Size, BlockMetadata: blocks,
		})
	})
}

// metadataRequest is a GetMetadataAllocatedRequest or a GetMetadataDeltaRequest.
type metadataRequest interface {
	GetStartingOffset() int64
	GetMaxResults() int32
}

// sendRanges checks the request, and sends the ranges of a snapshot. message sends one message of the stream.
func sendRanges(req metadataRequest, snapshot volume.Snapshot, ranges iter.Seq2[clone.Range, error], message func([]*csi.BlockMetadata) error) error {
	limit := int(req.GetMaxResults())
	switch offset := req.GetStartingOffset(); {
	case limit < 0:
		return volume.Errorf(volume.ErrInvalid, "max_results is %d: it must not be negative", limit)
	case offset < 0 || offset > snapshot.Size:
		return volume.Errorf(volume.ErrOutOfRange, "starting_offset %d: snapshot %s has %d bytes", offset, snapshot.ID, snapshot.Size)
	case limit == 0:
		limit = maxBlocks
	}
	return send(ranges, snapshot.Size, min(limit, maxBlocks), message)
}

// pair returns the base and the target of a request. It returns ErrInvalid if they are not snapshots of one
// volume, or if the base is newer than the target.
func (s *Server) pair(ctx context.Context, req *csi.GetMetadataDeltaRequest) (tracker backend.ChangeTracker, base, target volume.Snapshot, err error) {
	from, to := req.GetBaseSnapshotId(), req.GetTargetSnapshotId()
	if err := cmp.Or(translate.Required("base_snapshot_id", from), translate.Required("target_snapshot_id", to)); err != nil {
		return nil, base, target, err
	}
	if err := checkPair(from, to); err != nil {
		return nil, base, target, err
	}
	if _, base, err = s.tracked(ctx, from); err != nil {
		return nil, base, target, missingBase(err)
	}
	if tracker, target, err = s.tracked(ctx, to); err != nil {
		return nil, base, target, err
	}
	switch {
	case base.Source != target.Source:
		err = volume.Errorf(volume.ErrInvalid, "base_snapshot_id %q is of volume %s, target_snapshot_id %q of volume %s: name two snapshots of one volume", from, base.Source, to, target.Source)
	case base.Created.After(target.Created):
		err = volume.Errorf(volume.ErrInvalid, "base_snapshot_id %q is newer than target_snapshot_id %q: exchange them", from, to)
	}
	return tracker, base, target, err
}

// missingBase adds the remedy to the error for a base that does not exist. No extent map of a deleted snapshot is kept,
// because its addresses can have new content.
func missingBase(err error) error {
	if !errors.Is(err, volume.ErrNotFound) {
		return err
	}
	return fmt.Errorf("base_snapshot_id: %w: make a full backup, and keep its snapshot until the next backup is complete", err)
}

// checkPair refuses the IDs of two snapshots that cannot be of one volume.
func checkPair(base, target string) error {
	from, err := volume.ParseSnapshotID(base)
	if err != nil {
		return err
	}
	to, err := volume.ParseSnapshotID(target)
	if err != nil {
		return err
	}
	if from.Backend != to.Backend || !samePool(from, to) {
		return volume.Errorf(volume.ErrInvalid, "base_snapshot_id %q and target_snapshot_id %q are in different pools: name two snapshots of one volume", base, target)
	}
	return nil
}

// tracked returns a snapshot and its backend. It refuses a directory (ErrInvalid), and a backend that
// cannot list blocks (ErrPrecondition).
func (s *Server) tracked(ctx context.Context, text string) (backend.ChangeTracker, volume.Snapshot, error) {
	b, snapshot, err := s.snapshot(ctx, text)
	if err != nil {
		return nil, snapshot, err
	}
	if snapshot.Directory {
		return nil, snapshot, volume.Errorf(volume.ErrInvalid, "snapshot %s is a copy of a directory and has no blocks: compare its files", snapshot.ID)
	}
	tracker, can := b.(backend.ChangeTracker)
	if !can {
		return nil, snapshot, volume.Errorf(volume.ErrPrecondition, "snapshot %s: backend %s cannot list its blocks: make a full backup", snapshot.ID, snapshot.ID.Backend)
	}
	return tracker, snapshot, nil
}

// maxBlocks is the maximum number of ranges in a message. Such a message is far smaller than the
// limit of gRPC.
const maxBlocks = 4096

// granule is the size in bytes to which ranges are rounded outwards: the block size of the
// devices that a volume is restored to.
const granule = 4096

// send sends the ranges of a snapshot of a size in bytes, at most limit in a message.
func send(ranges iter.Seq2[clone.Range, error], size int64, limit int, message func([]*csi.BlockMetadata) error) error {
	var blocks []*csi.BlockMetadata
	for r, err := range ranges {
		if err != nil {
			return err
		}
		begin := r.Offset / granule * granule
		end := min((r.Offset+r.Length+granule-1)/granule*granule, size)
		if begin >= end {
			continue
		}
		if n := len(blocks); n > 0 && begin <= blocks[n-1].ByteOffset+blocks[n-1].SizeBytes {
			last := blocks[n-1]
			last.SizeBytes = max(last.SizeBytes, end-last.ByteOffset)
			continue
		}
		if len(blocks) == limit {
			if err := message(blocks); err != nil {
				return err
			}
			blocks = nil
		}
		blocks = append(blocks, &csi.BlockMetadata{ByteOffset: begin, SizeBytes: end - begin})
	}
	if len(blocks) == 0 {
		return nil
	}
	return message(blocks)
}
