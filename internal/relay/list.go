package relay

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/paging"
)

// List is a call that lists entries by pages.
type List[E any] struct {
	Method string
	// ID returns the ID of an entry. The ID is also a token of the list.
	ID func(E) string

	// request returns the request for one page.
	request func(token string, limit int32) proto.Message
	// content returns the content of a response.
	content func(proto.Message) (entries []E, next string)
	// response returns the response with the content.
	response func(entries []E, next string) proto.Message
}

// Fill answers a request for one page from sections. The page has at most limit entries.
func (l List[E]) Fill(ctx context.Context, req proto.Message, limit int, sections ...paging.Section[E]) (proto.Message, error) {
	r := req.(interface {
		GetStartingToken() string
		GetMaxEntries() int32
	})
	requested, err := paging.Limit(r.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	entries, next, err := paging.Fill(ctx, sections, r.GetStartingToken(), min(requested, limit), paging.Serial, l.ID)
	if err != nil {
		return nil, err
	}
	return l.response(entries, next), nil
}

// Section returns the section that contains the entries of a Service.
func (l List[E]) Section(s Service) paging.Section[E] {
	return func(ctx context.Context, token string, limit int) ([]E, string, error) {
		return l.Page(ctx, s, token, int32(limit))
	}
}

// Page requests one page from a Service.
func (l List[E]) Page(ctx context.Context, s Service, token string, limit int32) (entries []E, next string, err error) {
	resp, err := s.Call(ctx, l.Method, l.request(token, limit))
	if err != nil {
		return nil, "", err
	}
	entries, next = l.content(resp)
	return entries, next, nil
}

// All requests all pages from a Service.
func (l List[E]) All(ctx context.Context, s Service) (all []E, err error) {
	for token := ""; ; {
		entries, next, err := l.Page(ctx, s, token, 0)
		all = append(all, entries...)
		if err != nil || next == "" {
			return all, err
		}
		token = next
	}
}

// Volumes is ListVolumes.
var Volumes = List[*csi.ListVolumesResponse_Entry]{
	Method: csi.Controller_ListVolumes_FullMethodName,
	ID:     func(e *csi.ListVolumesResponse_Entry) string { return e.GetVolume().GetVolumeId() },
	response: func(entries []*csi.ListVolumesResponse_Entry, next string) proto.Message {
		return &csi.ListVolumesResponse{Entries: entries, NextToken: next}
	},
	request: func(token string, limit int32) proto.Message {
		return &csi.ListVolumesRequest{StartingToken: token, MaxEntries: limit}
	},
	content: func(m proto.Message) ([]*csi.ListVolumesResponse_Entry, string) {
		resp := m.(*csi.ListVolumesResponse)
		return resp.GetEntries(), resp.GetNextToken()
	},
}

// VolumeHealths is ControllerListVolumeHealth.
var VolumeHealths = List[*csi.VolumeHealth]{
	Method: csi.Controller_ControllerListVolumeHealth_FullMethodName,
	ID:     (*csi.VolumeHealth).GetVolumeId,
	response: func(entries []*csi.VolumeHealth, next string) proto.Message {
		return &csi.ControllerListVolumeHealthResponse{Entries: entries, NextToken: next}
	},
	request: func(token string, limit int32) proto.Message {
		return &csi.ControllerListVolumeHealthRequest{StartingToken: token, MaxEntries: limit}
	},
	content: func(m proto.Message) ([]*csi.VolumeHealth, string) {
		resp := m.(*csi.ControllerListVolumeHealthResponse)
		return resp.GetEntries(), resp.GetNextToken()
	},
}

// Snapshots is ListSnapshots without a filter.
var Snapshots = List[*csi.ListSnapshotsResponse_Entry]{
	Method: csi.Controller_ListSnapshots_FullMethodName,
	ID:     func(e *csi.ListSnapshotsResponse_Entry) string { return e.GetSnapshot().GetSnapshotId() },
	response: func(entries []*csi.ListSnapshotsResponse_Entry, next string) proto.Message {
		return &csi.ListSnapshotsResponse{Entries: entries, NextToken: next}
	},
	request: func(token string, limit int32) proto.Message {
		return &csi.ListSnapshotsRequest{StartingToken: token, MaxEntries: limit}
	},
	content: func(m proto.Message) ([]*csi.ListSnapshotsResponse_Entry, string) {
		resp := m.(*csi.ListSnapshotsResponse)
		return resp.GetEntries(), resp.GetNextToken()
	},
}
