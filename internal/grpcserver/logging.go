package grpcserver

import (
	"context"
	"fmt"
	"path"
	"runtime/debug"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// bodyLevel is the lowest log verbosity that includes requests and responses. Fields that the CSI
// specification marks as secret are removed.
const bodyLevel = 4

// LogCalls is the interceptor that logs one line for each call.
func LogCalls(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	kind, id := Subject(req)
	log := klog.LoggerWithValues(klog.FromContext(ctx), "method", path.Base(info.FullMethod), kind, id)
	ctx = klog.NewContext(ctx, log)
	if v := log.V(bodyLevel); v.Enabled() {
		v.Info("Request", "body", protosanitizer.StripSecrets(req).String())
	}
	start := time.Now()
	resp, err := handler(ctx, req)
	took := time.Since(start).Round(time.Microsecond)
	if err != nil {
		log.Info("Call failed", "code", status.Code(err), "took", took, "reason", status.Convert(err).Message())
		return resp, err
	}
	log.Info("Call done", "took", took)
	if v := log.V(bodyLevel); v.Enabled() {
		v.Info("Response", "body", protosanitizer.StripSecrets(resp).String())
	}
	return resp, nil
}

// Subject returns the kind of the object that a request concerns, and the ID of the object. If the request
// creates the object, Subject returns its name instead of an ID.
func Subject(req any) (kind, id string) {
	const kindVolume, kindSnapshot = "volume", "snapshot"
	switch r := req.(type) {
	case interface{ GetVolumeId() string }:
		return kindVolume, r.GetVolumeId()
	case interface{ GetSnapshotId() string }:
		return kindSnapshot, r.GetSnapshotId()
	case interface{ GetGroupSnapshotId() string }:
		return kindSnapshot, r.GetGroupSnapshotId()
	case interface{ GetTargetSnapshotId() string }:
		return kindSnapshot, r.GetTargetSnapshotId()
	case *csi.CreateSnapshotRequest:
		return kindSnapshot, r.GetName()
	case *csi.CreateVolumeGroupSnapshotRequest:
		return kindSnapshot, r.GetName()
	case interface{ GetName() string }:
		return kindVolume, r.GetName()
	}
	return kindVolume, ""
}

// RecoverPanics is the interceptor that converts a panic to an error.
func RecoverPanics(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	defer func() {
		if r := recover(); r != nil {
			klog.FromContext(ctx).Error(fmt.Errorf("panic: %v", r), "Call panicked", "method", info.FullMethod, "stack", string(debug.Stack()))
			resp, err = nil, status.Errorf(codes.Internal, "%s panicked: %v; this is a bug, please report it with the driver's log", path.Base(info.FullMethod), r)
		}
	}()
	return handler(ctx, req)
}
