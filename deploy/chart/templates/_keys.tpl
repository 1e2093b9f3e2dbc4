{{/* Refuses unknown keys: dict "definitions" those of the schema "schema" the schema of the value "value"
the value "path" the path of the value. This template and not the schema refuses them, because its
message can suggest the key that was meant. It reads files/schema.json, a copy of the schema (`make
manifests`), because templates cannot read values.schema.json. An object whose schema has properties
has no other keys, unless the schema has additionalProperties. A key with the value null is ignored,
because null removes a key. */}}
{{- define "trivet.checkKeys" -}}
{{- $schema := get .definitions (get .schema "$ref" | base) | default .schema -}}
{{- $known := $schema.properties | default dict -}}
{{- $others := $schema.additionalProperties | default dict -}}
{{- $of := dict "definitions" .definitions -}}
{{- if kindIs "slice" .value -}}
{{- range $i, $item := .value -}}
{{- include "trivet.checkKeys" (merge (dict "schema" ($schema.items | default dict) "value" $item "path" (printf "%s[%d]" $.path $i)) $of) -}}
{{- end -}}
{{- else if kindIs "map" .value -}}
{{- range $key, $value := .value -}}
{{- $path := printf "%s.%s" $.path $key | trimPrefix "." -}}
{{- if and $known (not $others) (not (hasKey $known $key)) (not (kindIs "invalid" $value)) -}}
{{- $nearest := include "trivet.nearest" (dict "key" $key "among" (keys $known | sortAlpha)) -}}
{{- $hint := ternary (printf "known there are %s" (keys $known | sortAlpha | join ", ")) (printf "did you mean %s?" $nearest) (empty $nearest) -}}
{{- fail (printf "\n\n%s is not a key of this chart: %s" $path $hint) -}}
{{- end -}}
{{- include "trivet.checkKeys" (merge (dict "schema" (get $known $key | default $others) "value" $value "path" $path) $of) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The word that is most similar to a key, or nothing if none is similar: dict "key" the key "among" a
list of words. The similarity is the share of letters and pairs of letters that both have in common. It
must be more than 60%. */}}
{{- define "trivet.nearest" -}}
{{- $parts := include "trivet.parts" .key | splitList " " -}}
{{- $nearest := "" -}}{{- $most := 60 -}}
{{- range .among -}}
{{- $own := include "trivet.parts" . | splitList " " -}}
{{- $common := 0 -}}
{{- range $own }}{{ if has . $parts }}{{ $common = add1 $common }}{{ end }}{{ end -}}
{{- $percent := div (mul 200 $common) (add (len $own) (len $parts)) -}}
{{- if gt $percent $most }}{{ $nearest = . }}{{ $most = $percent }}{{ end -}}
{{- end -}}
{{- $nearest -}}
{{- end -}}

{{/* The letters and the pairs of letters of a word. */}}
{{- define "trivet.parts" -}}
{{- $word := lower . -}}{{- $parts := list -}}
{{- range $i := until (len $word) -}}
{{- $parts = append $parts (substr $i (int (add $i 1)) $word) -}}
{{- if $i }}{{ $parts = append $parts (substr (int (sub $i 1)) (int (add $i 1)) $word) }}{{ end -}}
{{- end -}}
{{- uniq $parts | join " " -}}
{{- end -}}
