{{/* Unknown keys are refused here and not by the schema, which could not say what was
meant: files/schema.json is a copy of it (`make manifests`), since Helm hides the schema
itself from templates. An object with properties has no others, unless the schema has
additionalProperties. A key with null was taken away. dict "definitions" those of the schema "schema" that of the value
"value" "path" its name. */}}
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

{{/* The word that has most letters and pairs of letters in common with a key, if it is most
of them: dict "key" "among" (list of words). */}}
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

{{- define "trivet.parts" -}}
{{- $word := lower . -}}{{- $parts := list -}}
{{- range $i := until (len $word) -}}
{{- $parts = append $parts (substr $i (int (add $i 1)) $word) -}}
{{- if $i }}{{ $parts = append $parts (substr (int (sub $i 1)) (int (add $i 1)) $word) }}{{ end -}}
{{- end -}}
{{- uniq $parts | join " " -}}
{{- end -}}
